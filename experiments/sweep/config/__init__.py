"""A sweep as its YAML describes it: schema, checks, cells. Measures nothing."""
