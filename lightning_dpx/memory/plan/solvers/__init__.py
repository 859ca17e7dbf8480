"""What the planners calculate with: bounds, descents, and HiGHS where it is installed."""
