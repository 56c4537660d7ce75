"""The process beside each engine: its cache into the prefix index, its life into the registry."""
