"""The pages that show published results, written from the bundles: no figure is kept by hand."""
