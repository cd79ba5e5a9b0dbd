"""Symmetry: solves equal layers only once, by adding up equal columns and equal rows of the program (folding).

    X_C = sum of x_j over the columns j of class C;     a folded row is the sum of the rows of one class

If every column of C has the same sum of coefficients over the rows of each row class, and the same cost, then
each solution x of the program gives a solution X of the folded one at the same cost. So the folded optimum is
a lower bound, whatever the partition; and if some x with class sums X satisfies all rows, it is optimal.
Eighty equal layers become one layer with counts 0..80, and the branch and bound no longer enumerates their
permutations, on which it spends most of its time otherwise. A column whose value follows from other columns of the
program (it is 1 if one of 80 layers is selected) does not follow from their sums in the folded program, which only has
80 Z >= 1 there. So such columns have to be integers in the folded program.

A partition into classes with such equal sums is called equitable. The coarsest equitable partition is used. It is found
by color refinement (Grohe, Kersting, Mladenov, Selman 2014, "Dimension reduction via colour refinement",
arXiv:1307.5697); folding integer programs is orbital shrinking (Fischetti, Liberti, "Orbital Shrinking", ISCO 2012).
Refinement compares hashes; equal sums are then checked in exact integers, and a program that fails the check is not
folded.

networkx has color refinement as `weisfeiler_lehman_subgraph_hashes`. It finds the same classes of columns, with the
number of iterations given in advance, in 13 to 36 ms, where the refinement below takes 0.6 to 1.9 ms (programs of
examples/roberta_84m, flat and llama_1b at 0.7 of their peak; CPU time, networkx 3.6.1; 12 to 120 ms for the search).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from planner.search.integer_program import Program
from planner.search.linear_rows import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folded:
    """A program folded from another one (the original): its columns are classes of the original's columns."""

    program: Program
    class_of: np.ndarray
    """int64[columns]: the class of each column of the original. Classes are numbered by their first column."""

    @property
    def trivial(self) -> bool:
        """True if every class is a single column, so that nothing was folded."""
        return len(self.program.cost) == len(self.class_of)

    @property
    def sizes(self) -> np.ndarray:
        """int64[classes]: number of columns (variables of the integer program) in each class of equivalent ones."""
        return np.bincount(self.class_of)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Returns for each class the sum of `values` over its columns; `values` has one item per original column."""
        total = np.zeros(len(self.program.cost), values.dtype)
        np.add.at(total, self.class_of, values)
        return total

    def fixing(self, class_sums: np.ndarray, columns: np.ndarray) -> list[Row]:
        """Returns rows for the original program that fix the sum of each class to its value in `class_sums`.

        Args:
            class_sums: a sum for each class.
            columns: only classes that contain one of these columns are fixed.
        """
        rows = []
        for number in np.unique(self.class_of[columns]).tolist():
            members = np.flatnonzero(self.class_of == number)
            for sign in (1, -1):
                signs = np.full(len(members), sign, np.int64)
                rows.append(Row(columns=members, coefficients=signs, upper=sign * int(class_sums[number])))
        return rows


def fold(program: Program) -> Folded:
    """Returns `program` folded along its coarsest equitable partition."""
    column_class, row_class, entries = _refined(program)
    folded = _folded(program, column_class, row_class, entries)
    return folded or unfolded(program)


def unfolded(program: Program) -> Folded:
    """Returns `program` unchanged, as a `Folded` in which each column is a class of its own."""
    return Folded(program=program, class_of=np.arange(len(program.cost)))


def _refined(program: Program) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Computes the coarsest equitable partition by color refinement.

    Returns:
        The class of each column, the class of each row, and the program's entries as (row, column, coefficient).
    """
    lengths = [len(row.columns) for row in program.rows]
    row = np.repeat(np.arange(len(lengths)), lengths)
    column = np.concatenate([np.zeros(0, np.int64), *(r.columns for r in program.rows)])
    coefficient = np.concatenate([np.zeros(0, np.int64), *(r.coefficients for r in program.rows)])
    # Start from what is different at once, then refine rows by columns and columns by rows until nothing changes.
    column_class = _renumbered(program.cost, program.limit, program.integral.astype(np.int64))
    row_class = _renumbered(np.array([(r.upper, r.whole) for r in program.rows], np.int64).reshape(-1, 2))
    while True:
        before = column_class.max(initial=-1), row_class.max(initial=-1)
        row_class = _renumbered(row_class, _hashed(row, len(lengths), column_class[column], coefficient))
        column_class = _renumbered(column_class, _hashed(column, len(program.cost), row_class[row], coefficient))
        if (column_class.max(initial=-1), row_class.max(initial=-1)) == before:
            return column_class, row_class, (row, column, coefficient)


def _folded(
    program: Program,
    column_class: np.ndarray,
    row_class: np.ndarray,
    entries: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> Folded | None:
    """Returns the program with one column for each class of columns and one row for each class of rows.

    Returns None if the partition is not equitable, which means that columns of one class differ in their sums over a
    class of rows. That happens if two hashes were equal by chance.
    """
    row, column, coefficient = entries
    count, size = len(program.cost), np.bincount(column_class)
    # Sum of each column over each row class.
    pairs, position = np.unique(row_class[row] * count + column, return_inverse=True)
    total = np.zeros(len(pairs), np.int64)
    np.add.at(total, position, coefficient)
    pairs, total = pairs[total != 0], total[total != 0]
    # The partition is equitable if these sums are equal for all columns of a class.
    blocks, first, position = np.unique(
        pairs // count * count + column_class[pairs % count], return_index=True, return_inverse=True
    )
    same = total == total[first][position]
    if not same.all() or np.any(np.bincount(position, minlength=len(blocks)) != size[blocks % count]):
        return None
    # Rows of a class are added up. A sum is an integer in every solution only if all its rows are.
    upper = np.zeros(int(row_class.max(initial=-1)) + 1, np.int64)
    np.add.at(upper, row_class, np.array([r.upper for r in program.rows], np.int64))
    whole = np.ones(len(upper), bool)
    whole[row_class[[not r.whole for r in program.rows]]] = False
    ends = np.searchsorted(blocks // count, np.arange(len(upper) + 1))
    coefficients, classes = total[first], blocks % count
    leader = np.unique(column_class, return_index=True)[1]
    return Folded(
        program=Program(
            cost=program.cost[leader],
            limit=program.limit[leader] * size,
            integral=program.integral[leader],
            rows=tuple(
                Row(columns=classes[a:b], coefficients=coefficients[a:b], upper=int(u), whole=bool(w))
                for a, b, u, w in zip(ends[:-1], ends[1:], upper, whole, strict=True)
            ),
        ),
        class_of=column_class,
    )


def _renumbered(*keys: np.ndarray) -> np.ndarray:
    """Returns a class for each position, so that positions with equal keys get the same class.

    Classes are numbered by first appearance.
    """
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    table = np.column_stack([key.astype(np.int64) for key in keys])
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def _hashed(target: np.ndarray, count: int, colour: np.ndarray, coefficient: np.ndarray) -> np.ndarray:
    """Returns uint64[count]: for each target, a hash of its (color, coefficient) pairs, whatever their order.

    The hash is the sum of a mixing function (splitmix64) over the pairs. `target`, `colour` and `coefficient` have one
    item for each pair; targets are 0..count-1.
    """
    mixed = colour.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + coefficient.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    total = np.zeros(count, np.uint64)
    np.add.at(total, target, mixed ^ (mixed >> np.uint64(31)))
    return total
