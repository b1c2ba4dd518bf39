"""Values with their own rules for cuts and joins: of registered classes, and of a few packages.

``registry.py`` finds the rules of a value, and ``object_state.py`` compares and changes objects of
any class. Each other file has the rules of one package, which it does not import: classes are
recognized by the names of their bases.
"""
