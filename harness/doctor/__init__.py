"""Is this machine fit to measure?"""
