"""Plans of other systems, read into what a proposal begins with: `partc plan MODEL --from FILE`."""
