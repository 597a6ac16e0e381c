// The bodies of prefixwise's HTTP API. Written by `make docs` from the OpenAPI document (/openapi.json); do not edit.
//
//   const body: ScoreRequest = { query: "Review: ", items: ["I loved it."], labels: [" positive", " negative"] };
//   const response = await fetch(`${url}/v1/score`, { method: "POST", body: JSON.stringify(body) });
//   const { scores } = (await response.json()) as ScoreResponse;

export type ScoreRequest = {
  /** The text or token ids that all items are scored against; at least one character or token. */
  query: string | Array<number>;
  /** A list of texts, or a list of lists of token ids; one text is one item. An item may be empty. */
  items: string | Array<string> | Array<Array<number>>;
  /** Labels as text; give either labels or label_token_ids. A classifier takes neither: it scores its classes. */
  labels?: Array<string> | null;
  /** Labels as token ids; with label_scoring "sequence" a list of ids is one label. */
  label_token_ids?: Array<number | Array<number>> | null;
  /** Text or token ids after every item, of the same type as the query. */
  suffix?: string | Array<number> | null;
  /** true: score mode "softmax"; false: "prob", of a classifier "logit". Must agree with score_mode if both are given. */
  apply_softmax?: boolean | null;
  /** Another name for apply_softmax. */
  softmax?: boolean | null;
  /** What a score is; if absent, "softmax" with apply_softmax, else "prob", of a classifier "logit". */
  score_mode?: "softmax" | "prob" | "logprob" | "logit" | "logit_diff" | "sigmoid" | null;
  /** single: a label is one token; sequence: the log-probabilities of its tokens are added up. */
  label_scoring?: "single" | "sequence" | null;
  /** separate: query and item are tokenized by themselves; joint: as one text. */
  tokenization?: "separate" | "joint" | "apart" | null;
  /** Put the item before the query. */
  item_first?: boolean | null;
  /** Cut the ends of longer items; items are never cut if absent. */
  max_tokens_per_item?: number | null;
  /** The token in query and items whose embeddings are overridden; required with overrides. */
  embed_override_token_id?: number | null;
  /** A vector for each such token of the query, in place of the token's row of the embedding table. */
  query_embed_overrides?: Array<Array<number>> | {
    base64: string;
    dtype: "float32" | "bfloat16";
  } | null;
  /** The same for each item; null for an item whose tokens keep their embeddings. */
  item_embed_overrides?: Array<Array<Array<number>> | {
    base64: string;
    dtype: "float32" | "bfloat16";
  } | null> | null;
  /** How the items share the computation of their prefix; the scores are the same. */
  algorithm?: "auto" | "serial" | "packed" | "prefill_extend" | null;
  /** fail: a wrong item fails the request; report: it is listed in item_errors and its scores are null. */
  on_item_error?: "fail" | "report" | null;
  /** Also return the hidden state at each item's scored position, after the final norm. */
  return_pooled_hidden_states?: boolean | null;
  /** Report in `debug` how the scores were computed. */
  return_debug?: boolean | null;
  /** With return_debug and one item: also report the item's tokens and this many of the most likely next tokens. */
  debug_top_k?: number | null;
  /** Other profiles bring their own labels; use them on the rerank routes. */
  profile?: "plain" | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
};

export type ScoreResponse = {
  object: "scoring";
  model: string;
  /** Rows in item order, columns in label order; null for an item in item_errors. */
  scores: Array<Array<number> | null>;
  usage: {
    /** The query once, plus all items. */
    prompt_tokens: number;
    total_tokens: number;
    completion_tokens: 0;
    prompt_tokens_details: {
      /** Prefix tokens that were in the KV cache. */
      cached_tokens: number;
    };
  };
  /** The names of a classifier's classes, in the order of the columns. */
  labels?: Array<string>;
  /** Of each item, if return_pooled_hidden_states is set; null for an item in item_errors. */
  pooled_hidden_states?: Array<Array<number> | null>;
  /** Items that were cut to max_tokens_per_item. */
  truncated?: Array<{
    index: number;
    original_tokens: number;
    kept_tokens: number;
  }>;
  /** Items without scores, if on_item_error is "report". */
  item_errors?: Array<{
    index: number;
    code: string;
    message: string;
  }>;
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
  /** Present if return_debug is set. */
  debug?: Record<string, unknown>;
};

/** The fields beside `requests` are defaults of the fields that a request does not have. */
export type ScoreManyRequest = {
  requests: Array<unknown>;
  query?: null;
  items?: null;
  /** Labels as text; give either labels or label_token_ids. A classifier takes neither: it scores its classes. */
  labels?: Array<string> | null;
  /** Labels as token ids; with label_scoring "sequence" a list of ids is one label. */
  label_token_ids?: Array<number | Array<number>> | null;
  /** Text or token ids after every item, of the same type as the query. */
  suffix?: unknown;
  /** true: score mode "softmax"; false: "prob", of a classifier "logit". Must agree with score_mode if both are given. */
  apply_softmax?: boolean | null;
  /** Another name for apply_softmax. */
  softmax?: boolean | null;
  /** What a score is; if absent, "softmax" with apply_softmax, else "prob", of a classifier "logit". */
  score_mode?: "softmax" | "prob" | "logprob" | "logit" | "logit_diff" | "sigmoid" | null;
  /** single: a label is one token; sequence: the log-probabilities of its tokens are added up. */
  label_scoring?: "single" | "sequence" | null;
  /** separate: query and item are tokenized by themselves; joint: as one text. */
  tokenization?: "separate" | "joint" | "apart" | null;
  /** Put the item before the query. */
  item_first?: boolean | null;
  /** Cut the ends of longer items; items are never cut if absent. */
  max_tokens_per_item?: number | null;
  /** The token in query and items whose embeddings are overridden; required with overrides. */
  embed_override_token_id?: number | null;
  /** A vector for each such token of the query, in place of the token's row of the embedding table. */
  query_embed_overrides?: unknown;
  /** The same for each item; null for an item whose tokens keep their embeddings. */
  item_embed_overrides?: unknown;
  /** How the items share the computation of their prefix; the scores are the same. */
  algorithm?: "auto" | "serial" | "packed" | "prefill_extend" | null;
  /** fail: a wrong item fails the request; report: it is listed in item_errors and its scores are null. */
  on_item_error?: "fail" | "report" | null;
  /** Also return the hidden state at each item's scored position, after the final norm. */
  return_pooled_hidden_states?: boolean | null;
  /** Report in `debug` how the scores were computed. */
  return_debug?: boolean | null;
  /** With return_debug and one item: also report the item's tokens and this many of the most likely next tokens. */
  debug_top_k?: number | null;
  /** Other profiles bring their own labels; use them on the rerank routes. */
  profile?: "plain" | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
};

export type ScoreManyResponse = {
  object: "list";
  model: string;
  /** One for each request, in their order: its response, or its error. */
  data: Array<ScoreResponse | Error>;
  usage: {
    /** The query once, plus all items. */
    prompt_tokens: number;
    total_tokens: number;
    completion_tokens: 0;
    prompt_tokens_details: {
      /** Prefix tokens that were in the KV cache. */
      cached_tokens: number;
    };
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

/** One text, or as many as of the second kind, each of which makes a pair with one of them. */
export type VllmScoreRequest = {
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** vLLM's way to send the instruction, the one argument that a profile's prompt takes. */
  chat_template_kwargs?: {
    instruction?: string | null;
  } | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** Cut documents so that no prompt has more tokens than this; -1: than the model reads. */
  truncate_prompt_tokens?: number | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** false: return the scores as they are before the mapping to 0 .. 1. */
  use_activation?: boolean | null;
  /** The response's id, unless the header X-Request-Id has one. */
  request_id?: string | null;
} & ({
  text_1: string | Array<string | {
    text: string;
  }>;
  text_2: string | Array<string | {
    text: string;
  }>;
} | {
  queries: string | Array<string | {
    text: string;
  }>;
  documents: string | Array<string | {
    text: string;
  }>;
} | {
  queries: string | Array<string | {
    text: string;
  }>;
  items: string | Array<string | {
    text: string;
  }>;
} | {
  data_1: string | Array<string | {
    text: string;
  }>;
  data_2: string | Array<string | {
    text: string;
  }>;
});

export type VllmScoreResponse = {
  id: string;
  object: "list";
  created: number;
  model: string;
  /** One for each pair or item, in their order. */
  data: Array<{
    index: number;
    object: "score";
    score: number;
  }>;
  usage: {
    /** The query once, plus all items. */
    prompt_tokens: number;
    total_tokens: number;
    completion_tokens: 0;
    prompt_tokens_details: {
      /** Prefix tokens that were in the KV cache. */
      cached_tokens: number;
    };
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
  /** Second texts that were cut. */
  truncated?: Array<{
    index: number;
    original_tokens: number;
    kept_tokens: number;
  }>;
};

export type GenerativeScoringRequest = {
  /** The text or token ids that all items are scored against; at least one character or token. */
  query: string | Array<number>;
  /** A list of texts, or a list of lists of token ids; one text is one item. An item may be empty. */
  items: string | Array<string> | Array<Array<number>>;
  /** Labels as token ids; with label_scoring "sequence" a list of ids is one label. */
  label_token_ids: Array<number | Array<number>>;
  /** true: score mode "softmax"; false: "prob", of a classifier "logit". Must agree with score_mode if both are given. */
  apply_softmax?: boolean | null;
  /** Put the item before the query. */
  item_first?: boolean | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
  /** false: a text query does not begin with BOS. */
  add_special_tokens?: boolean | null;
  /** The response's id, unless the header X-Request-Id has one. */
  request_id?: string | null;
};

export type JudgeRequest = {
  /** The chat, which the model's chat template renders. With items, {item} stands once where each item is put; what comes before it is computed once. An assistant's message at the end is the beginning of the answer. */
  messages: Array<{
    role: "system" | "user" | "assistant" | "developer";
    content: string | Array<{
      type: "text";
      text: string;
    }>;
    /** Has no effect. */
    name?: string | null;
  }>;
  /** The texts to judge, each by itself; one text is one item. If absent, the chat itself is judged. */
  items?: string | Array<string> | null;
  /** The answers to choose from, or a scale: "1-5", "A-E", or answers with slashes like "yes/no". */
  answers: Array<string | number> | string;
  /** The value of each answer, for the expected value; if absent, the answers themselves where all are numbers. */
  values?: Array<number> | null;
  /** Cut the ends of longer items; items are never cut if absent. */
  max_tokens_per_item?: number | null;
  /** How the items share the computation of their prefix; the scores are the same. */
  algorithm?: "auto" | "serial" | "packed" | "prefill_extend" | null;
  /** Report in `debug` how the answers were computed. */
  return_debug?: boolean | null;
  /** With return_debug and one item: also report the item's tokens and this many of the most likely next tokens. */
  debug_top_k?: number | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
};

export type JudgeResponse = {
  object: "judge";
  model: string;
  /** In the order of probs. */
  answers: Array<string>;
  /** One for each item, in their order; one if the request has no items. */
  results: Array<{
    index: number;
    /** The most likely answer. */
    answer: string;
    /** The probability of each answer among all of them. */
    probs: Array<number>;
    /** The mean of the answers' values; null if they have none. */
    expected_value: number | null;
    /** Of the distribution, in bits. */
    entropy: number;
    /** How likely it is that the model gives one of the answers at all. */
    mass: number;
  }>;
  usage: {
    /** The query once, plus all items. */
    prompt_tokens: number;
    total_tokens: number;
    completion_tokens: 0;
    prompt_tokens_details: {
      /** Prefix tokens that were in the KV cache. */
      cached_tokens: number;
    };
  };
  /** Items that were cut to max_tokens_per_item. */
  truncated?: Array<{
    index: number;
    original_tokens: number;
    kept_tokens: number;
  }>;
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
  /** Present if return_debug is set. */
  debug?: Record<string, unknown>;
};

export type ClassifyRequest = {
  /** What to classify: one text, several, or the token ids of either. */
  input: string | Array<string> | Array<number> | Array<Array<number>>;
  /** For a guard (Llama Guard, ShieldGemma) only: the user's message. The inputs are then responses to it; without it they are users' messages. */
  query?: string | null;
  /** true: numbers by the model's problem_type (softmax, sigmoid or none); false: logits. */
  use_activation?: boolean | null;
  /** Put the special tokens that the tokenizer adds (BOS, EOS) around each text. Token ids stay as they are. */
  add_special_tokens?: boolean | null;
  /** Cut longer inputs to this many tokens, special tokens counted; -1: to as many as the model takes. If absent, an input that does not fit is an error. */
  truncate_prompt_tokens?: -1 | number | null;
  /** The end of a long input to cut. */
  truncation_side?: "right" | "left" | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** The response's id, unless the header X-Request-Id has one. */
  request_id?: string | null;
  /** Has no effect. */
  user?: string | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
};

export type ClassifyResponse = {
  id: string;
  object: "list";
  created: number;
  model: string;
  /** One for each input, in their order. */
  data: Array<{
    index: number;
    /** The class with the largest number, by its id2label. */
    label: string;
    /** In the order of the classes; logits if use_activation is false. */
    probs: Array<number>;
    num_classes: number;
  }>;
  /** The names of the classes, in the order of probs. */
  labels: Array<string>;
  usage: {
    /** The query once, plus all items. */
    prompt_tokens: number;
    total_tokens: number;
    completion_tokens: 0;
    prompt_tokens_details: {
      /** Prefix tokens that were in the KV cache. */
      cached_tokens: number;
    };
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
  /** Inputs that were cut to truncate_prompt_tokens. */
  truncated?: Array<{
    index: number;
    original_tokens: number;
    kept_tokens: number;
  }>;
};

export type EmbedRequest = {
  /** What to classify: one text, several, or the token ids of either. */
  input: string | Array<string> | Array<number> | Array<Array<number>>;
  /** Put the special tokens that the tokenizer adds (BOS, EOS) around each text. Token ids stay as they are. */
  add_special_tokens?: boolean | null;
  /** Cut longer inputs to this many tokens, special tokens counted; -1: to as many as the model takes. If absent, an input that does not fit is an error. */
  truncate_prompt_tokens?: -1 | number | null;
  /** The end of a long input to cut. */
  truncation_side?: "right" | "left" | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** The response's id, unless the header X-Request-Id has one. */
  request_id?: string | null;
  /** Has no effect. */
  user?: string | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
  /** float: lists of numbers; base64: their bytes, float32 and little-endian. */
  encoding_format?: "float" | "base64" | null;
};

export type EmbedResponse = {
  id: string;
  object: "list";
  created: number;
  model: string;
  /** One for each input, in their order. */
  data: Array<{
    index: number;
    object: "embedding";
    /** The hidden state after the last token; with encoding_format base64 its bytes. */
    embedding: Array<number> | string;
  }>;
  usage: {
    /** The query once, plus all items. */
    prompt_tokens: number;
    total_tokens: number;
    completion_tokens: 0;
    prompt_tokens_details: {
      /** Prefix tokens that were in the KV cache. */
      cached_tokens: number;
    };
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
  /** Inputs that were cut to truncate_prompt_tokens. */
  truncated?: Array<{
    index: number;
    original_tokens: number;
    kept_tokens: number;
  }>;
};

/** One request; many with `requests`; vLLM's with `text_1` or `queries`. */
export type AnyScoreRequest = ScoreRequest | ScoreManyRequest | VllmScoreRequest;

/** In the form of the request. */
export type AnyScoreResponse = ScoreResponse | ScoreManyResponse | VllmScoreResponse;

export type PrefixRequest = {
  /** The text or token ids that all items are scored against; at least one character or token. */
  query: string | Array<number>;
  /** How long the prefix stays pinned. */
  ttl_seconds?: number | null;
  /** Pin the prefix of rerank requests with this profile ("default": the model's own); the query must be text. If absent, pin the prefix of requests to /v1/score. */
  profile?: string | null;
  /** The instruction of the rerank requests; if absent, the profile's own. */
  instruction?: string | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
};

export type Prefix = {
  object: "prefix";
  /** The prefix_id of DELETE /v1/prefix/{prefix_id}. */
  id: string;
  model: string;
  /** Tokens of the prefix, with BOS and delimiter. */
  tokens: number;
  /** Of these, tokens that were in the KV cache. */
  cached_tokens: number;
  /** Memory on each device. */
  bytes: number;
  ttl_seconds: number;
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type PrefixList = {
  object: "list";
  data: Array<Prefix>;
};

export type PrefixReleased = {
  object: "prefix";
  id: string;
  deleted: true;
};

export type CompletionRequest = {
  /** One text, several, or the token ids of either. */
  prompt: string | Array<string> | Array<number> | Array<Array<number>>;
  max_tokens: 0 | 1;
  /** Return the prompt, too, with the log-probabilities of its tokens. */
  echo?: boolean | null;
  /** Return log-probabilities, at each position also of so many of the most likely tokens. */
  logprobs?: number | null;
  /** Begin a prompt of text with BOS where the model has one. */
  add_special_tokens?: boolean | null;
  /** Choices for each prompt. */
  n?: 1 | null;
  /** Has no effect: the token that follows is the most likely one. */
  temperature?: number | null;
  /** Has no effect: nothing is random. */
  seed?: number | null;
  /** Has no effect. */
  user?: string | null;
  /** Show each token as `token_id:ID` in place of its text, of which several tokens may have the same. */
  return_tokens_as_token_ids?: boolean | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** The response's id, unless the header X-Request-Id has one. */
  request_id?: string | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
};

export type CompletionResponse = {
  id: string;
  object: "text_completion";
  created: number;
  model: string;
  choices: Array<{
    /** Of the prompt. */
    index: number;
    /** With `echo` the prompt, then the token that follows it. */
    text: string;
    logprobs: {
      tokens: Array<string>;
      /** Of each token behind those before it; null for the first token of a prompt. */
      token_logprobs: Array<number | null>;
      /** The most likely tokens at each position, and the one that is there. */
      top_logprobs: Array<Record<string, unknown> | null>;
      /** Where each token begins in the text. */
      text_offset: Array<number>;
    } | null;
    /** stop: the token ends a text. */
    finish_reason: "length" | "stop";
  }>;
  usage: {
    prompt_tokens: number;
    completion_tokens: number;
    total_tokens: number;
    prompt_tokens_details: {
      cached_tokens: number;
    };
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type ChatCompletionRequest = {
  /** The chat, which the model's chat template renders. */
  messages: Array<{
    role: "system" | "user" | "assistant" | "developer";
    content: string | Array<{
      type: "text";
      text: string;
    }>;
    /** Has no effect. */
    name?: string | null;
  }>;
  /** Tokens to generate: 1, the most likely one. */
  max_tokens?: 1 | null;
  /** The newer name of max_tokens. */
  max_completion_tokens?: 1 | null;
  /** Return the log-probability of the token. */
  logprobs?: boolean | null;
  /** Also those of so many of the most likely tokens. */
  top_logprobs?: number | null;
  /** Choices for each prompt. */
  n?: 1 | null;
  /** Has no effect: the token that follows is the most likely one. */
  temperature?: number | null;
  /** Has no effect: nothing is random. */
  seed?: number | null;
  /** Has no effect. */
  user?: string | null;
  /** Show each token as `token_id:ID` in place of its text, of which several tokens may have the same. */
  return_tokens_as_token_ids?: boolean | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** The response's id, unless the header X-Request-Id has one. */
  request_id?: string | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
} & ({
  max_tokens: 1;
} | {
  max_completion_tokens: 1;
});

export type ChatCompletionResponse = {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: Array<{
    index: number;
    message: {
      role: "assistant";
      content: string;
    };
    logprobs: {
      content: Array<{
        token: string;
        logprob: number;
        bytes: Array<number>;
        top_logprobs: Array<{
          token: string;
          logprob: number;
          bytes: Array<number>;
        }>;
      }>;
    } | null;
    /** stop: the token ends a text. */
    finish_reason: "length" | "stop";
  }>;
  usage: {
    prompt_tokens: number;
    completion_tokens: number;
    total_tokens: number;
    prompt_tokens_details: {
      cached_tokens: number;
    };
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type DetokenizeRequest = {
  tokens: Array<number>;
  /** A served name. */
  model?: string | null;
};

export type DetokenizeResponse = {
  prompt: string;
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type TokenizerInfo = {
  bos_token: string | null;
  eos_token: string | null;
  unk_token: string | null;
  pad_token: string | null;
  chat_template: string | null;
  /** Whether prompts of text begin with BOS. */
  add_bos_token: boolean;
  model_max_length: number;
  vocab_size: number;
};

export type TokenizeRequest = {
  /** One text, or a list of texts. */
  text?: string | Array<string> | null;
  /** Another name for text; give one of the two. */
  prompt?: string | Array<string> | null;
  /** Put the tokens that start a prompt (BOS) before each text. */
  add_special_tokens?: boolean | null;
  /** A served name; if absent or "default", the served model. */
  model?: string | null;
} & ({
  text: string | Array<unknown>;
  prompt?: null;
} | {
  text?: null;
  prompt: string | Array<unknown>;
});

export type TokenizeResponse = {
  model: string;
  tokens: Array<number> | Array<Array<number>>;
  count: number | Array<number>;
  max_model_len: number;
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type Model = {
  id: string;
  object: "model";
  created: number;
  owned_by: "prefixwise";
  /** The model's own name, or the folder of a LoRA adapter. */
  root: string | null;
  /** Of a LoRA adapter: the model that it changes. */
  parent: string | null;
  /** null while the model loads. */
  max_model_len: number | null;
};

export type ModelList = {
  object: "list";
  data: Array<Model>;
};

export type LoadLoraRequest = {
  /** What requests send as `model`. */
  lora_name: string;
  /** A folder on the server. */
  lora_path: string;
  /** Replace an adapter of this name. */
  load_inplace?: boolean;
};

export type UnloadLoraRequest = {
  lora_name: string;
};

export type LoraResponse = {
  success: true;
  error_message: string;
  /** Folders by name. */
  loaded_adapters: Record<string, unknown>;
};

/** A JSON file of a benchmark or validation run. */
export type Artifact = Record<string, unknown>;

export type ReportList = {
  /** Whether the server was started with --reports-dir. */
  has_folder: boolean;
  artifacts: Array<{
    name: string;
    folder: string;
    kind: string;
    bytes: number;
    /** What the file is, if it cannot be shown as a report. */
    note: string | null;
  }>;
};

export type Health = {
  status: "ok";
};

export type HealthGenerate = {
  status: "ok";
  milliseconds: number;
};

export type ServerInfo = {
  status: "starting" | "ready" | "draining" | "stopped";
  version: string;
  uptime_seconds: number;
  api_key_set: boolean;
  served_model_names: Array<string>;
  /** The configuration, every `auto` resolved. */
  configuration: Record<string, unknown>;
  versions: Record<string, unknown>;
  /** Peak bytes of the host, and the memory of the devices as the backend reports it. */
  memory: Record<string, unknown>;
  model?: Record<string, unknown>;
  devices?: Record<string, unknown>;
  buckets?: Record<string, unknown>;
  prefix_cache?: Record<string, unknown>;
  max_queued_tokens?: number;
  stats?: Record<string, unknown>;
};

export type Error = {
  error: {
    /** What was expected, what the request had, what to do. */
    message: string;
    type: "authentication_error" | "invalid_request_error" | "invalid_value_error" | "missing_parameter_error" | "model_error" | "permission_error" | "rate_limit_error" | "server_error";
    /** The wrong field. */
    param: string | null;
    /** A code from the table of errors. */
    code: string;
  };
  /** The message again, for clients that only read this. */
  detail: string;
  /** The message again, for clients that only read this. */
  message: string;
};

export type RerankRequest = {
  /** The text that the documents are ordered by. */
  query: string;
  /** The documents to order; at least one. Documents may be empty or repeated. */
  documents: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** vLLM's way to send the instruction, the one argument that a profile's prompt takes. */
  chat_template_kwargs?: {
    instruction?: string | null;
  } | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** Cut a document that does not fit into up to this many chunks, of which the best one counts; 1 if absent. */
  max_chunks_per_doc?: number | null;
  /** true: cut a document that does not fit; false: it is an error. */
  truncate?: boolean | null;
  /** Cut documents so that no prompt has more tokens than this; -1: than the model reads. */
  truncate_prompt_tokens?: number | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** How the items share the computation of their prefix; the scores are the same. */
  algorithm?: "auto" | "serial" | "packed" | "prefill_extend" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_n?: number | null;
  /** If a document is an object, only its `text` is read. */
  rank_fields?: ["text"] | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** Report in `meta.debug` how the scores were computed. */
  return_debug?: boolean | null;
  /** With return_debug and one item: also report the item's tokens and this many of the most likely next tokens. */
  debug_top_k?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** Return each document with its score. */
  return_documents?: boolean | null;
  /** Also return each score as it is before the mapping to 0 .. 1, as raw_score. */
  return_raw_scores?: boolean | null;
  /** false: return the scores as they are before the mapping to 0 .. 1. */
  use_activation?: boolean | null;
};

export type RerankResponse = {
  id: string;
  object: "list";
  model: string;
  /** Best first. */
  results: Array<{
    /** The index in the request. */
    index: number;
    /** From 0 to 1, unless use_activation is false. */
    relevance_score: number;
    /** Before the mapping to 0 .. 1, if return_raw_scores is set. */
    raw_score?: number;
    document?: {
      text: string;
    };
  }>;
  usage: {
    prompt_tokens: number;
    total_tokens: number;
    prompt_tokens_details: {
      cached_tokens: number;
    };
  };
  meta: {
    api_version: {
      version: string;
    };
    billed_units: {
      search_units: number;
    };
    tokens: {
      input_tokens: number;
      output_tokens: 0;
    };
    /** Prefix tokens that were in the KV cache. */
    cached_tokens: number;
    /** The profile that made the prompt. */
    profile: string;
    /** The model has no known profile, documents were cut, or unknown fields were ignored. */
    warnings?: Array<string>;
    /** Documents that were cut. */
    truncated?: Array<{
      index: number;
      original_tokens: number;
      kept_tokens: number;
    }>;
    /** Present if return_debug is set. */
    debug?: Record<string, unknown>;
  };
};

export type RerankV2Request = {
  /** The text that the documents are ordered by. */
  query: string;
  /** The documents to order; at least one. Documents may be empty or repeated. */
  documents: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** vLLM's way to send the instruction, the one argument that a profile's prompt takes. */
  chat_template_kwargs?: {
    instruction?: string | null;
  } | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** Cut a document that does not fit into up to this many chunks, of which the best one counts; 1 if absent. */
  max_chunks_per_doc?: number | null;
  /** true: cut a document that does not fit; false: it is an error. */
  truncate?: boolean | null;
  /** Cut documents so that no prompt has more tokens than this; -1: than the model reads. */
  truncate_prompt_tokens?: number | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** How the items share the computation of their prefix; the scores are the same. */
  algorithm?: "auto" | "serial" | "packed" | "prefill_extend" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_n?: number | null;
  /** If a document is an object, only its `text` is read. */
  rank_fields?: ["text"] | null;
  /** Requests with lower numbers are served first. */
  priority?: number | null;
  /** Report in `meta.debug` how the scores were computed. */
  return_debug?: boolean | null;
  /** With return_debug and one item: also report the item's tokens and this many of the most likely next tokens. */
  debug_top_k?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** Return each document with its score. */
  return_documents?: boolean | null;
  /** Also return each score as it is before the mapping to 0 .. 1, as raw_score. */
  return_raw_scores?: boolean | null;
  /** false: return the scores as they are before the mapping to 0 .. 1. */
  use_activation?: boolean | null;
};

export type RerankV2Response = {
  id: string;
  /** Best first. */
  results: Array<{
    /** The index in the request. */
    index: number;
    /** From 0 to 1, unless use_activation is false. */
    relevance_score: number;
    /** Before the mapping to 0 .. 1, if return_raw_scores is set. */
    raw_score?: number;
  }>;
  meta: {
    api_version: {
      version: string;
    };
    billed_units: {
      search_units: number;
    };
    tokens: {
      input_tokens: number;
      output_tokens: 0;
    };
    /** Prefix tokens that were in the KV cache. */
    cached_tokens: number;
    /** The profile that made the prompt. */
    profile: string;
    /** The model has no known profile, documents were cut, or unknown fields were ignored. */
    warnings?: Array<string>;
    /** Documents that were cut. */
    truncated?: Array<{
      index: number;
      original_tokens: number;
      kept_tokens: number;
    }>;
    /** Present if return_debug is set. */
    debug?: Record<string, unknown>;
  };
};

export type TeiRerankRequest = {
  /** The text that the documents are ordered by. */
  query: string;
  /** The documents to order; at least one. Documents may be empty or repeated. */
  texts: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** true: cut a text that does not fit; false: it is an error. If absent, as the server's --auto-truncate says. */
  truncate?: boolean | null;
  /** The end of a long text to cut. */
  truncation_direction?: "Right" | "Left" | "right" | "left" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_n?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** Return the scores as they are before the mapping to 0 .. 1. */
  raw_scores?: boolean | null;
  /** Return each text with its score. */
  return_text?: boolean | null;
};

/** Best first. */
export type TeiRerankResponse = Array<{
  index: number;
  score: number;
  text?: string;
}>;

export type TeiError = {
  error: string;
  error_type: "Validation" | "Empty" | "Tokenizer" | "Overloaded" | "Unhealthy" | "Backend";
};

export type TeiInfo = {
  model_id: string;
  model_sha: null;
  model_dtype: string;
  served_model_name: string;
  model_type: {
    reranker: Record<string, unknown>;
  } | {
    classifier: Record<string, unknown>;
  };
  max_concurrent_requests: number;
  max_input_length: number;
  max_batch_tokens: number;
  max_batch_requests: null;
  max_client_batch_size: number;
  auto_truncate: boolean;
  tokenization_workers: number;
  version: string;
  sha: null;
  docker_label: null;
};

export type SglangRerankRequest = {
  /** The text that the documents are ordered by. */
  query: string;
  /** The documents to order; at least one. Documents may be empty or repeated. */
  documents: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruct?: string | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_n?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** Return each document with its score. */
  return_documents?: boolean | null;
};

/** Best first. */
export type SglangRerankResponse = Array<{
  score: number;
  document?: string;
  index: number;
  meta_info: null;
}>;

export type SglangError = {
  object: "error";
  message: string;
  type: string;
  param: string | null;
  /** The status. */
  code: number;
};

export type InfinityRerankRequest = {
  /** The text that the documents are ordered by. */
  query: string;
  /** The documents to order; at least one. Documents may be empty or repeated. */
  documents: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_n?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** Return each document with its score. */
  return_documents?: boolean | null;
  /** Return the scores as they are before the mapping to 0 .. 1. */
  raw_scores?: boolean | null;
};

export type InfinityRerankResponse = {
  object: "rerank";
  results: Array<{
    index: number;
    relevance_score: number;
    document?: string;
  }>;
  model: string;
  usage: {
    prompt_tokens: number;
    total_tokens: number;
  };
  id: string;
  created: number;
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type VoyageRerankRequest = {
  /** The text that the documents are ordered by. */
  query: string;
  /** The documents to order; at least one. Documents may be empty or repeated. */
  documents: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** true: cut a document that does not fit; false: it is an error. */
  truncation?: boolean | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_k?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** Return each document with its score. */
  return_documents?: boolean | null;
};

export type VoyageRerankResponse = {
  object: "list";
  data: Array<{
    index: number;
    relevance_score: number;
    document?: string;
  }>;
  model: string;
  usage: {
    total_tokens: number;
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type MixedbreadRerankRequest = {
  /** The text that the documents are ordered by. */
  query: string;
  /** The documents to order; at least one. Documents may be empty or repeated. */
  input: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_k?: number | null;
  /** If a document is an object, only its `text` is read. */
  rank_fields?: ["text"] | null;
  /** Only false: the query is scored as it is. */
  rewrite_query?: false | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
  /** Return each input with its score. */
  return_input?: boolean | null;
};

export type MixedbreadRerankResponse = {
  object: "list";
  model: string;
  data: Array<{
    index: number;
    score: number;
    input?: unknown;
    object: "rank_result";
  }>;
  usage: {
    prompt_tokens: number;
    total_tokens: number;
    completion_tokens: 0;
  };
  top_k: number;
  return_input: boolean;
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

export type NvidiaRankingRequest = {
  /** The text that the passages are ordered by, in an object. */
  query: {
    text: string;
  };
  /** The documents to order; at least one. Documents may be empty or repeated. */
  passages: Array<string | {
    text: string;
  }>;
  /** The profile that makes the prompt; if absent or "default", the one of the model. */
  profile?: string | null;
  /** What makes a document relevant, in words; if absent, the profile's own instruction. */
  instruction?: string | null;
  /** Cut longer documents; if absent, a document is cut only if it does not fit. */
  max_tokens_per_doc?: number | null;
  /** END: cut the end of a passage that does not fit; NONE: it is an error. */
  truncate?: "NONE" | "END" | null;
  /** The end of a long document to cut. */
  truncation_side?: "right" | "left" | null;
  /** How many of the best documents to return; all if absent or larger than their number. */
  top_n?: number | null;
  /** Any name, unless the server was started with --strict-model. */
  model?: string | null;
};

export type NvidiaRankingResponse = {
  /** Best first. */
  rankings: Array<{
    index: number;
    logit: number;
  }>;
  usage: {
    prompt_tokens: number;
    total_tokens: number;
  };
  /** Unknown fields, which were ignored, and labels that are hardly meant. */
  warnings?: Array<string>;
};

/** TEI's with `texts`, Voyage's with `top_k` or `truncation`, Infinity's with `raw_scores`, else Cohere's. */
export type AnyRerankRequest = TeiRerankRequest | RerankRequest | VoyageRerankRequest | InfinityRerankRequest;

/** In the dialect of the request. */
export type AnyRerankResponse = TeiRerankResponse | RerankResponse | VoyageRerankResponse | InfinityRerankResponse;

/** In the dialect of the request. The second one without a readable body. */
export type AnyError = TeiError | Error;

/** Mixedbread's with `input`, Voyage's with `top_k` or `truncation`, Infinity's with `raw_scores`, SGLang's with `instruct` or with --rerank-format sglang, else Cohere's. */
export type AnyRerankV1Request = RerankRequest | SglangRerankRequest | VoyageRerankRequest | InfinityRerankRequest | MixedbreadRerankRequest;

/** In the dialect of the request. */
export type AnyRerankV1Response = RerankResponse | SglangRerankResponse | VoyageRerankResponse | InfinityRerankResponse | MixedbreadRerankResponse;

/** In the dialect of the request. The first one without a readable body. */
export type AnyV1Error = Error | SglangError;

/** The bodies of every route that answers with JSON. */
export interface Routes {
  "POST /v1/score": { request: AnyScoreRequest; response: AnyScoreResponse };
  "POST /score": { request: VllmScoreRequest; response: VllmScoreResponse };
  "POST /generative_scoring": { request: GenerativeScoringRequest; response: VllmScoreResponse };
  "POST /v1/judge": { request: JudgeRequest; response: JudgeResponse };
  "POST /v1/completions": { request: CompletionRequest; response: CompletionResponse };
  "POST /v1/chat/completions": { request: ChatCompletionRequest; response: ChatCompletionResponse };
  "POST /classify": { request: ClassifyRequest; response: ClassifyResponse };
  "POST /v1/embeddings": { request: EmbedRequest; response: EmbedResponse };
  "POST /v1/rerank": { request: AnyRerankV1Request; response: AnyRerankV1Response };
  "POST /v2/rerank": { request: RerankV2Request; response: RerankV2Response };
  "POST /rerank": { request: AnyRerankRequest; response: AnyRerankResponse };
  "POST /v1/ranking": { request: NvidiaRankingRequest; response: NvidiaRankingResponse };
  "POST /v1/reranking": { request: MixedbreadRerankRequest; response: MixedbreadRerankResponse };
  "POST /v1/prefix": { request: PrefixRequest; response: Prefix };
  "GET /v1/prefix": { request: undefined; response: PrefixList };
  "DELETE /v1/prefix/{prefix_id}": { request: undefined; response: PrefixReleased };
  "POST /tokenize": { request: TokenizeRequest; response: TokenizeResponse };
  "POST /detokenize": { request: DetokenizeRequest; response: DetokenizeResponse };
  "GET /tokenizer_info": { request: undefined; response: TokenizerInfo };
  "GET /v1/models": { request: undefined; response: ModelList };
  "GET /v1/models/{model}": { request: undefined; response: Model };
  "POST /load_lora_adapter": { request: LoadLoraRequest; response: LoraResponse };
  "POST /unload_lora_adapter": { request: UnloadLoraRequest; response: LoraResponse };
  "GET /health": { request: undefined; response: Health };
  "GET /ping": { request: undefined; response: Health };
  "POST /ping": { request: undefined; response: Health };
  "GET /health_generate": { request: undefined; response: HealthGenerate };
  "GET /info": { request: undefined; response: TeiInfo };
  "GET /server_info": { request: undefined; response: ServerInfo };
  "GET /reports/list": { request: undefined; response: ReportList };
}
