"""Speed."""


def measure_same(commit):
    return []
