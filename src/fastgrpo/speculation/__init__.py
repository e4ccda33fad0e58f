"""How tokens are drawn: noise, sampling, the engine. Runs without TRL."""
