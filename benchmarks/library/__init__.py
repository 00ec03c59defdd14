"""`make bench-library`: `import outrider` as a library, measured."""
