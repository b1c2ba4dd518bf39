"""Launches on a Ray cluster.

Ray reserves resources and starts an actor per node; the ranks are processes of a pool, as on one
machine. No other file of `launch` imports Ray; workers on Ray are in `workers/ray_workers.py`.

word            | meaning in Ray
--------------- | --------------------------------------------------------------------------------
actor           | a process that Ray starts on a node for an object. `actor.method.remote(...)`
                | calls a method there, and returns a reference at once
reference       | stands for a value that is not there yet: `ray.wait` waits for it, `ray.get`
                | returns it
placement group | reserved resources: a list of bundles, here one per node. STRICT_SPREAD puts each
                | bundle on a node of its own

file            | contents                                         | tests
--------------- | ------------------------------------------------ | -------------------------------
_node_actor.py  | the actor of a node: starts the server that      | launch/ray/test_ray_launcher.py
                | forks ranks, and connects them                   |
ray_machines.py | nodes as machines of a launch: their             | launch/ray/test_connections.py
                | connections, and lost nodes                      | launch/ray/test_ray_launcher.py
reservation.py  | join the cluster; reserve resources in a         | launch/ray/test_ray_launcher.py
                | placement group                                  | launch/test_missing_clusters.py
"""
