"""Launches on a Ray cluster.

Ray reserves resources and starts an actor per node; the ranks are processes of a pool, as on one
machine. No other file of `launch` imports Ray; workers on Ray are in `workers/ray_workers.py`.

file            | contents                                         | tests
--------------- | ------------------------------------------------ | -------------------------------
_node_actor.py  | the actor of a node: starts the server that      | launch/ray/test_ray_launcher.py
                | forks ranks, and connects them                   |
ray_machines.py | nodes as machines of a launch: their             | launch/ray/test_connections.py
                | connections, and lost nodes                      | launch/ray/test_ray_launcher.py
reservation.py  | join the cluster; reserve resources in a         | launch/ray/test_ray_launcher.py
                | placement group                                  | launch/test_missing_clusters.py
"""
