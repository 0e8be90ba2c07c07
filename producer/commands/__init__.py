"""The commands of `trtq`, a few to a file. `producer.cli` puts them together."""
