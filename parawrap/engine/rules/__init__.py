"""Values with their own rules for cuts and joins: of registered classes, and of a few packages.

This package cuts, joins, moves, and changes values of such classes. It has no code for calls,
lanes, or models. It imports none of the packages that it has rules for, and recognizes their
classes by the names of their bases.

file                   | contents                          | tests
---------------------- | --------------------------------- | ---------------------------------------
registry.py            | `register_split`; find the rules  | engine/test_register_split.py
                       | of a value, cut and join it by    |
                       | them                              |
object_state.py        | compare and change objects of any | engine/test_register_split.py
                       | class: items, attributes, slots   | api/parallel/test_borrowed_arguments.py
splitter.py            | `Splitter`: the functions that a  | engine/test_register_split.py
                       | type's rules consist of, and      |
                       | their errors                      |
geometric_graphs.py    | batches of PyTorch Geometric      | engine/test_packages.py
tensordicts.py         | TensorDicts, lazy stacks, and     | engine/test_packages.py
                       | tensorclass instances             |
transformers_caches.py | caches of transformers, such as   | engine/test_packages.py
                       | `past_key_values`                 |
"""
