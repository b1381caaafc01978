"""Statistics of a store: aggregated on Spark, shown as a page."""
