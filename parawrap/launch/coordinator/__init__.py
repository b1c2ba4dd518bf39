"""The launching process: start the guards of a launch, collect output, and decide how the launch ends."""
