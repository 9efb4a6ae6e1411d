"""Settings for nbgrader; `make exercises VARIANT=2027` puts a copy into the course folder. Run nbgrader there."""

c = get_config()  # nbgrader defines it

c.CourseDirectory.course_id = "specdec-lite"

# The slowest cell of a solution needs a few seconds; an endless loop costs its own cell and no other.
c.Execute.timeout = 120  # seconds for a cell; nbgrader's own is 30
c.Execute.startup_timeout = 120

# Autograding puts back locked cells that were changed. Missing ones too:
c.OverwriteCells.add_missing_cells = True

# A learner may print a lot.
c.LimitOutput.max_lines = 1000
c.LimitOutput.max_traceback = 100
