"""The agent's work on the target: machine facts, the lock, records of servers, and measurements."""
