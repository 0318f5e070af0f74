"""Stages of a pipeline: the share of one micro-batch, divided over an axis whose ranks have other parts of the model.

Each op gets a stage, and the share becomes a bundle: for each stage a program for forward, one for backward, and one
for the update, with sends and receives for what crosses stages.

The files, from the step to its programs:

- ``stage_axis.py``: a program's share over an axis of stages, from the mode's options to the bundle
- ``cut_model.py``, ``place_nodes.py``: where the model is cut; the stage of each node
- ``agreed.py``: sizes, shapes and layouts as all ranks know them, by which they decide
- ``add_apart.py``, ``collect_rows.py``: sums of values of several stages, such as a tied weight's gradient; results
  that are rows
- ``bodies.py``: what each program computes, takes, receives and sends
- ``send_recv.py``: the stage boundary: what is sent together, how it lies then, when it is waited for
- ``write_stage_programs.py``, ``split_program.py``: one program; all of them, as a bundle that is checked
- ``schedules.py``, ``schedule_files.py``: the order of programs on each rank; as torch's tools read and write it

``passes/runtime/message_collectives.py`` has the ops that send and receive.
"""

OWNS = (
    *("stages", "virtual_stages", "schedules", "has_stages", "on_own_stages", "dumped_stages", "run_stages"),
    "STAGES_AXIS",
)
"""Identifiers of this feature. No further file outside of it may name one (``tests/test_structure.py``)."""
