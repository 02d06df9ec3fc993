//! What was typed becomes what it means, once; one file a verb.

mod card;
mod compare;
mod device;
mod eval;
mod generate;
mod model;
mod output;
mod size;
mod synth;
mod tokenize;
mod verify;

use crate::error::{Error, Kind};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;

/// Run Moonshot's Kimi K3 on one workstation.
#[derive(Parser)]
#[command(name = "trunkline", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Args, Clone)]
struct Global {
    /// stdout carries JSON lines only
    #[arg(long, global = true)]
    json: bool,
    /// No progress and no notes on stderr; errors still
    #[arg(long, short, global = true)]
    quiet: bool,
    /// More on stderr; twice for debugging (RUST_LOG overrides)
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Verb {
    /// Continue a prompt
    Generate(generate::Flags),
    /// Measure how well a text is predicted: NLL and perplexity
    Eval(eval::Flags),
    /// Run the same ids on two devices and show how far they are apart
    Compare(compare::Flags),
    /// Show the ids and pieces of a text, or the text of ids
    Tokenize(tokenize::Flags),
    /// Check a checkpoint's structure: index, headers, sizes, names, dtypes, shapes, tokenizer
    Verify(verify::Flags),
    /// Write a synthetic checkpoint in the released layout
    Synth(synth::Flags),
}

/// Which checkpoint.
#[derive(Args, Clone)]
struct ModelFlags {
    /// Checkpoint folder (config.json, shards, index) or Hugging Face cache entry; again for shards on other drives
    /// [default: the embedded demo]
    #[arg(long, value_name = "PATH", env = "TRUNKLINE_MODEL", value_delimiter = None)]
    model: Vec<PathBuf>,
}

/// Flags of the verbs that run the model.
#[derive(Args, Clone)]
struct RunFlags {
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    device: device::DeviceFlags,
    #[command(flatten)]
    machine: MachineFlags,
    /// Writes a timeline for Perfetto or Chrome: layers, CPU operations, reads, uploads and GPU passes
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// What of the machine a run may take.
#[derive(Args, Clone)]
struct MachineFlags {
    /// Host memory to use, e.g. 20GB, 1.5GiB [default: what is free, less a margin]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    ram: Option<u64>,
    /// Positions to plan for [default: 4096, or the prompt plus --max-tokens if that is more; eval and compare: the tokens
    /// fed]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    context: Option<usize>,
    /// Compute threads [default: physical cores]
    #[arg(long, value_name = "N", value_parser = threads, allow_negative_numbers = true)]
    threads: Option<usize>,
    /// Tokens per prefill chunk
    #[arg(long, value_name = "N", default_value = "256", value_parser = positive, allow_negative_numbers = true)]
    prefill_chunk: usize,
    /// Reads in flight
    #[arg(long, value_name = "N", default_value = "8", value_parser = threads, allow_negative_numbers = true)]
    io_depth: usize,
}

/// A number of threads: each read in flight has one too.
fn threads(text: &str) -> Result<usize, String> {
    match positive(text) {
        Ok(n) if n <= 1024 => Ok(n),
        _ => Err("expected a whole number from 1 to 1024".into()),
    }
}

/// A whole number of at least 1.
fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if n >= 1 => Ok(n),
        _ => Err("expected a whole number of at least 1".into()),
    }
}

/// Runs the program on the process's arguments and returns its exit code.
pub fn main() -> u8 {
    if std::env::var_os("TRUNKLINE_MODEL").is_some_and(|v| v.is_empty()) {
        // SAFETY: as below.
        unsafe { std::env::remove_var("TRUNKLINE_MODEL") };
    }
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // Mesa's drivers complain on stderr where a session has no such folder (over ssh, in containers); they only look
        // for a display there, and nothing here needs one.
        // SAFETY: the first thing the program does, while it has one thread.
        unsafe { std::env::set_var("XDG_RUNTIME_DIR", std::env::temp_dir()) };
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version are answers, not errors, and so is the help after no verb at all. A closed pipe loses
            // nobody's work here.
            if !e.use_stderr() || e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
                let _ = e.print();
                return if e.use_stderr() { Kind::Usage.exit_code() } else { 0 };
            }
            return report(&usage(&e));
        }
    };
    let level = match cli.global.verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level)).init();
    let result = match &cli.verb {
        Verb::Generate(f) => generate::run(f, &cli.global),
        Verb::Eval(f) => eval::run(f, &cli.global),
        Verb::Compare(f) => compare::run(f, &cli.global),
        Verb::Tokenize(f) => tokenize::run(f, &cli.global),
        Verb::Verify(f) => verify::run(f, &cli.global),
        Verb::Synth(f) => synth::run(f, &cli.global),
    };
    match result {
        Ok(()) => 0,
        Err(e) => {
            let runs = matches!(cli.verb, Verb::Generate(_) | Verb::Eval(_));
            if runs && cli.global.json {
                // A failure before the run began; one within it has been written with what was reached. The error itself
                // matters more than one of writing it.
                let _ = output::error_event(&e, &[]);
            }
            report(&e)
        }
    }
}

/// What the parser says of wrong usage, as one line.
fn usage(e: &clap::Error) -> Error {
    let text = e.render().to_string();
    let message: Vec<&str> = text.lines().map(str::trim).take_while(|l| !l.is_empty()).collect();
    let line = message.join(" ");
    Error::usage(line.strip_prefix("error: ").unwrap_or(&line)).hint("--help lists the flags of a verb")
}

/// Prints an error once, and its hint; returns the exit code.
fn report(e: &Error) -> u8 {
    if e.kind() != Kind::ClosedPipe {
        let mut err = std::io::stderr().lock();
        // Nobody is left to be told when stderr itself is closed.
        let _ = writeln!(err, "error: {e}");
        if let Some(hint) = e.hint_text() {
            let _ = writeln!(err, "hint: {hint}");
        }
    }
    e.kind().exit_code()
}
