"""Plain arrays and the code that works on them, for all packages. They contain tokens, but know no engines or policies.
Import from the modules: this module stays empty, so the import of one structure does not compile another."""
