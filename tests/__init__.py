"""Tests, by room: see the README's map. ``tests.support`` holds what they share."""
