"""Level-based control: keys are queued, the world is gathered, planned for, and changed."""
