"""What a target model is: loading, its cache, one forward. Runs without TRL."""
