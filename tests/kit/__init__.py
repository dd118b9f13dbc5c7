"""The vocabulary of tests that train on ranks.

A test describes runs, does something with each on gloo ranks, and compares what they return:

    TP = Case(parallel=ParallelSpec(tp=2))
    NOT_SUMMED = Fault("megafp8.parallel.tensor.RowParallel.reduce_output", unchanged)
    CASES = {"tensor": TP, "outputs are not summed": replace(TP, faults=(NOT_SUMMED,))}


    def gradients(case: Case, mesh: Mesh) -> list[Piece]:  # of a module: ranks import it
        state = case.build(mesh)
        train(state, case, steps=2)
        return pieces(state, state.masters.stored_grads)

    def test_gradients_are_those_of_one_process() -> None:
        ranks = on_ranks(gradients, CASES, size=2)  # by case, then by rank
        (one,) = alone(gradients, {"one": Case()}).values()
        assert_close(assembled(ranks["tensor"]), assembled([one]), 2e-5)
        with pytest.raises(AssertionError):
            assert_close(assembled(ranks["outputs are not summed"]), assembled([one]), 2e-5)

`cases.py`: `Case` describes a run: model, precision, layout (`ParallelSpec` with tp, cp, dp, pp),
optimizer, text, a checkpoint to begin with or to write, and what is planted. `build(mesh)` makes
its state, `microbatches(step, mesh)` this rank's text, and `spec()` its `RunSpec`.

`runs.py`: `on_ranks(work, cases, size)` and `alone(work, cases)`; `on_mesh(work, size)` for what
needs no case; `train(state, case)` returns `Steps`: results, losses, norms, bytes that were sent.

`tensors.py`: `Piece` is a rank's part of a logical tensor; `pieces`, `weights` and `saved` return
a rank's. `assembled` makes whole tensors of all ranks' and compares copies bit for bit.
`assert_same` compares bits, and `assert_close` within a fraction of each tensor's largest element.

`faults.py`: `Fault` is an error that is planted by a dotted name, on all ranks or on one, and
`planted` is the context for what has no case.

Beside them, `tests/tiny.py` has the small model and `tests/ranks.py` starts the processes. Several
tests share one training by a fixture with `scope="module"` that returns `on_ranks(...)`; a state
that later runs continue is a case with `saves=folder`, and theirs have `begins=step_folder`.

What ranks return is pickled, and so are the cases: tensors may be in it, but none in FP8 (`pieces`
has their numbers), no models and no closures. `work` and `Fault.wrong` are functions of modules, or
a `functools.partial` of one.
"""
