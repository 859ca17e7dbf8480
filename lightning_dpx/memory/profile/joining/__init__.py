"""Profiles of steps that call different parts of a module become the profile of a step that calls them all."""
