"""What the planners calculate with: bounds, descents, walks, dynamic programming, and HiGHS where it is installed."""
