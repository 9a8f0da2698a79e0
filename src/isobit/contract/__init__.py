"""The kernel contract: gates that every implementation of every op must pass, and the report of a run."""
