"""What tree to draft before each step: labels, training and latencies of the network that
chooses.
"""
