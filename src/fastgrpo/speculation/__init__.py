"""How tokens are drawn, proposed and verified: the noise, the sampling law, and the rollout engine.

Runs without TRL. Nothing is re-exported here; import from the modules: `noise` and `sampling` know no model,
`engine` drives one.
"""
