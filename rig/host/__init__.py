"""Host settings: facts in, settings out, each with reason and source; preflight and memory fit. Pure."""
