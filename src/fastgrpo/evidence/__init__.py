"""How anyone checks the claims: benches, reports, the doctor."""
