"""Images that requests bring or point to: `loader.py` reads a data, http(s) or file URL and decodes what it finds.

What comes from outside is not trusted: `addresses.py` says which addresses may be connected to, `fetch.py` connects to
no other, `decode.py` looks at an image's format and size before it decodes it. All limits are in these files.
"""
