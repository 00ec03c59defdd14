"""`edge-client bench`: a YAML of links × modes × policies in, one folder of results out."""
