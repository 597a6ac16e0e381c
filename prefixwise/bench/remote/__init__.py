"""`prefixwise ops`: benchmark runs on this machine, over ssh, or on Google Cloud.

A target (targets/) runs a command and copies files. The agent (agent.py, on_target/) runs on the target and is called
by agent_client.py. Sweeps, comparisons, `doctor`, `install` and `collect` are the same code for every target.
"""
