"""How the policy learns: data, rewards, the trainer."""
