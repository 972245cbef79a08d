"""Pure decisions: values in, one value out. No clock, no I/O, no Ray."""
