"""The verbs of `edge-client`, a module each, and their parser. Imports every room; nothing imports it."""
