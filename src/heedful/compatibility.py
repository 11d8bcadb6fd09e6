"""The versions of torch and transformers that heedful is tested with; imports nothing heavy."""

TESTED = {"torch": ("2.13.0", "2.14.1"), "transformers": ("5.17.0", "5.23.0", "5.24.0")}
"""The versions that the test suite runs with, oldest to newest."""


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
