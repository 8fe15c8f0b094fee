"""A `JobRun` over processes that run already: they train on while a new coordinator takes them over."""
