"""A step, watched or imagined: bytes, lifetimes and times of everything that backward keeps."""
