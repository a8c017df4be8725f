"""What stands in for the real part in tests; the suites of the real parts hold for each."""
