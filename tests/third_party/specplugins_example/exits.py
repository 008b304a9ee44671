raise SystemExit("a module that exits")
