//! The `trunkline` program: parse, call the verb, print the error once, exit.

fn main() -> std::process::ExitCode {
    trunkline::cli::main().into()
}
