"""The Conductor: a pure library that places, admits and predicts. No I/O, no clock, no chance of its own."""
