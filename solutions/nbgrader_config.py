"""Settings for nbgrader; `make exercises VARIANT=2027` puts a copy into the course folder. Run nbgrader there."""

from nbgrader import preprocessors
from nbgrader.api import Gradebook

c = get_config()  # nbgrader defines it


class OnlyOurCells(preprocessors.DeduplicateIds):
    """Forget the marks of cells that are there twice, or that the assignment does not have: they are a learner's own.

    nbgrader 0.9.6 leaves half of their marks behind, takes those for an old format, and stops grading the whole class.
    """

    def preprocess(self, nb, resources):
        nb, resources = super().preprocess(nb, resources)
        where = resources["nbgrader"]
        with Gradebook(where["db_url"]) as book:
            ours = {cell.name for cell in book.find_notebook(where["notebook"], where["assignment"]).source_cells}
        for cell in nb.cells:
            if cell.metadata.get("nbgrader", {}).get("grade_id") not in ours:
                cell.metadata.pop("nbgrader", None)
        return nb, resources


c.CourseDirectory.course_id = "specdec-lite"

# release/ is there already. nbgrader would skip it, and would not write the assignment into the grade book either.
c.GenerateAssignment.force = True

# nbgrader's own list, our step in place of DeduplicateIds. Locked cells that were changed are put back. Deleted ones
# are not: their task has no points. (`make grade` puts them back.)
c.Autograde.sanitize_preprocessors = [
    preprocessors.ClearOutput,
    OnlyOurCells,
    preprocessors.OverwriteKernelspec,
    preprocessors.OverwriteCells,
    preprocessors.CheckCellMetadata,
]

# The slowest cell of a solution needs a few seconds; an endless loop costs its own cell and no other.
c.Execute.timeout = 120  # seconds for a cell; nbgrader's own is 30
c.Execute.startup_timeout = 120
c.Execute.iopub_timeout = 60  # a busy machine needs longer than the 4 of nbgrader to hand over what a cell printed

# A learner may print a lot.
c.LimitOutput.max_lines = 1000
c.LimitOutput.max_traceback = 100
