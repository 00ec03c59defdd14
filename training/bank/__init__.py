"""The bank of pairs: other targets, texts and drafts than the embedded pair's, to judge the controller on.
Imports the recipes of `training` and the exporter."""
