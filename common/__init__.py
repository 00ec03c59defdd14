"""Code that both sides share. Imports numpy alone, and none of our other packages."""
