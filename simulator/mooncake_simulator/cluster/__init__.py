"""Whole clusters in discrete events, around the Conductor that serves: hours of a trace in seconds."""
