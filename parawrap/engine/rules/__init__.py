"""Values that have their own rules for being cut and joined: of registered classes, and of a few known packages.

``registry.py`` finds the rules of a value. Each other file has the rules of one package, which it does not import: classes
are recognized by the names of their bases.
"""
