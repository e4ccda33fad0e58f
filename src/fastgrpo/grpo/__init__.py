"""How the policy learns: prompts and gold answers (data.py), rewards (rewards.py), and the trainer on top of TRL."""
