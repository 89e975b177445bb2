"""Small networks from a `network.json` and safetensors: layers, their graph, and what policies make of their outputs.

`kinds.network` and `kinds.policy` load them, `parallm export` writes them. docs/NETWORKS.md describes the file.
"""
