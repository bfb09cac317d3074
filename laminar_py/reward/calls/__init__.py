"""Worker processes that call reward functions. The pool kills a worker that hangs."""
