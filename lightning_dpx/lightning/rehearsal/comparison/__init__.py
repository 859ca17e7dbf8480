"""One run of a step beside another: what is seen of each, what slices are merged by, and what differs."""
