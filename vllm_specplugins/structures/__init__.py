"""Plain arrays and the code that works on them, used by all packages. They know tokens, but no engines or policies.
Import from the modules: this one stays empty, so importing one structure does not compile another."""
